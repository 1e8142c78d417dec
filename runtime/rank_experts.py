"""A rank's side of a re-placement: counts loads, gets experts ready beside those in use, and changes over at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe.experts import GatedMlp
from moe.moves import Batch, Move
from moe.placed import PlacedLayer
from moe.placement import Placement
from moe.replicas import replica_table
from parallel.group import Group
from parallel.linear import Storage
from runtime.models.config import ModelConfig
from runtime.models.expert_weights import (
    expert_name,
    fingerprint,
    from_values,
    layer_prefix,
    num_values,
    read_mlp,
    values_of,
)
from runtime.models.part_reader import PartReader
from runtime.placement_messages import (
    AskLoads,
    Loads,
    MoveWeights,
    Place,
    PlacementReply,
    PlacementRequest,
    Stage,
    Staged,
    batch_of,
    fingerprints_of,
    placement_of,
)
from runtime.weights import WeightSource

Key = tuple[int, int]  # layer and expert


@dataclass(frozen=True, kw_only=True)
class HeldExperts:
    """What was loaded by a placement: the layers, and where weights can be had again."""

    placement: Placement
    layers: Mapping[int, PlacedLayer]
    fingerprints: dict[Key, int]
    model: ModelConfig
    folder: Path
    device: torch.device
    storage: Storage


@dataclass
class _Round:
    """A placement on its way in. A thread of its own gets ready what it needs, so that no step waits for that."""

    round_id: int
    placement: Placement
    ranks_per_node: int
    expected: Mapping[Key, int]
    missing: set[Key]  # what this rank lacks
    parts: dict[Key, Tensor] = field(default_factory=dict)  # values that have come so far
    # Whole experts from other ranks, with the number of each; None: no more come.
    arrived: queue.SimpleQueue[tuple[Move, Tensor] | None] = field(default_factory=queue.SimpleQueue)
    is_over: bool = False  # nobody wants it any more
    # The thread's:
    tables: dict[int, Tensor] = field(default_factory=dict)  # per layer, for `ReplicaMap`
    ready: dict[Key, GatedMlp] = field(default_factory=dict)
    found: dict[Key, int] = field(default_factory=dict)  # fingerprints of what is ready
    error: str = ""
    is_done: bool = False  # ready or failed; set last
    is_told: bool = False  # by the thread of the steps, to the controller


class RankExperts:
    """Takes the controller's requests in the order of the plan ring; what takes long runs beside the steps."""

    def __init__(self, held: HeldExperts, ep: Group) -> None:
        self._held, self._ep = held, ep
        self.placement = held.placement
        self._fingerprints = dict(held.fingerprints)
        self._round: _Round | None = None
        self._giving: dict[Key, Tensor] = {}  # values of experts that are being sent piece by piece

    @property
    def is_staging(self) -> bool:
        """Whether `poll` will have something to say before long."""
        return self._round is not None and not self._round.is_told

    @torch.inference_mode()
    def take(self, message: PlacementRequest) -> list[PlacementReply]:
        """One request, on the thread that runs the steps: all ranks take it before the same step."""
        if isinstance(message, AskLoads):
            return [self._loads(message.round_id)]
        if isinstance(message, Stage):
            self._stage(message)
        elif isinstance(message, MoveWeights):
            self._move(message)
        elif isinstance(message, Place):
            self._place(message)
        return self.poll()

    def poll(self) -> list[PlacementReply]:
        """What is to be told by now."""
        current = self._round
        if current is None or not current.is_done or current.is_told:
            return []
        current.is_told = True
        return [Staged(round_id=current.round_id, num_read=len(current.ready), error=current.error)]

    def _loads(self, round_id: int) -> Loads:
        layers = [self._held.layers[layer] for layer in self.placement.layers]
        counts = torch.stack([layer.replicas.take_counts() for layer in layers]).cpu().numpy()
        held = [
            [self._fingerprints[number, expert] for expert in layer.held]
            for number, layer in zip(self.placement.layers, layers, strict=True)
        ]
        return Loads(round_id=round_id, counts=counts.tobytes(), fingerprints=np.array(held, np.uint64).tobytes())

    def _stage(self, message: Stage) -> None:
        self._forget()
        placement = placement_of(message)
        known = fingerprints_of(message)
        assert placement.layers == self.placement.layers, (placement.layers, self.placement.layers)
        expected: dict[Key, int] = {}
        missing: set[Key] = set()
        for idx, layer in enumerate(placement.layers):
            for expert in placement.experts[idx, self._ep.rank].tolist():
                if known is not None:
                    expected[layer, expert] = int(known[idx, expert])
                if expert not in self._held.layers[layer].held:
                    missing.add((layer, expert))
        self._round = current = _Round(message.round_id, placement, message.ranks_per_node, expected, missing)
        if not missing:
            current.arrived.put(None)
        threading.Thread(
            target=self._get_ready, args=(current, message.source), name="lockstep-experts", daemon=True
        ).start()

    def _get_ready(self, current: _Round, source: str) -> None:
        """The thread of a round: the replica tables, then experts from files or as they arrive."""
        try:
            with torch.inference_mode():
                for layer in current.placement.layers:
                    table = replica_table(current.placement, layer, self._ep.rank, current.ranks_per_node)
                    current.tables[layer] = table.to(self._held.device)
                if source == "files":
                    self._read_files(current)
                else:
                    self._take_arrived(current)
            left = current.missing - current.ready.keys()
            if left and not current.is_over:
                raise ValueError(f"layer {min(left)[0]}, expert {min(left)[1]} has come from nowhere")
        except Exception as error:  # noqa: BLE001  (whatever it is, this round fails and the steps go on)
            current.error = " ".join(str(error).split()) or type(error).__name__
        current.is_done = True

    def _read_files(self, current: _Round) -> None:
        held = self._held
        with WeightSource(held.folder) as source:
            reader = PartReader(source, held.device, held.storage)
            for layer, expert in sorted(current.missing):
                if current.is_over:
                    return
                name = expert_name(layer_prefix(layer), expert)
                self._accept(current, (layer, expert), read_mlp(reader, name, held.model), str(source.folder))

    def _take_arrived(self, current: _Round) -> None:
        held = self._held
        while (arrived := current.arrived.get()) is not None:
            move, values = arrived
            name = expert_name(layer_prefix(move.layer), move.expert)
            mlp = from_values(values, held.device, held.storage, name, held.model)
            self._accept(current, (move.layer, move.expert), mlp, f"rank {move.source}")

    def _move(self, message: MoveWeights) -> None:
        """One exchange; every rank makes it, also one that neither gives nor takes."""
        batch = batch_of(message)
        mine = [move for move in batch.moves if move.source == self._ep.rank]
        coming = [move for move in batch.moves if move.target == self._ep.rank]
        size = self._ep.size
        width = batch.end - batch.begin
        rows = [self._values(move, batch) for move in mine]  # in order of target
        given = torch.stack(rows) if rows else torch.empty(0, width, device=self._held.device)
        send = [sum(move.target == rank for move in mine) for rank in range(size)]
        receive = [sum(move.source == rank for move in coming) for rank in range(size)]
        got = self._ep.all_to_all_uneven(given, send, receive).wait()  # [len(coming), width] in order of source
        current = self._round
        if current is None or current.round_id != message.round_id:
            return
        by_source = sorted(coming, key=lambda move: move.source)  # stable: the sender's order within a source
        for move, values in zip(by_source, got, strict=True):
            self._collect(current, move, batch, values)
        if message.is_last:
            current.arrived.put(None)

    def _values(self, move: Move, batch: Batch) -> Tensor:
        """[end - begin] values of an expert that is here."""
        key = (move.layer, move.expert)
        values = self._giving.get(key)
        if values is None:
            values = values_of(self._held.layers[move.layer].mlp(move.expert))
        if batch.end < len(values):
            self._giving[key] = values
        else:
            self._giving.pop(key, None)
        return values[batch.begin : batch.end]

    def _collect(self, current: _Round, move: Move, batch: Batch, values: Tensor) -> None:
        key = (move.layer, move.expert)
        total = num_values(self._held.model)
        if batch.begin == 0:
            current.parts[key] = torch.empty(total, device=self._held.device)
        current.parts[key][batch.begin : batch.end] = values
        if batch.end == total:
            current.arrived.put((move, current.parts.pop(key)))

    def _accept(self, current: _Round, key: Key, mlp: GatedMlp, source: str) -> None:
        """Raises ValueError naming layer, expert and source when the weights are not those that others serve."""
        found = fingerprint(mlp)
        expected = current.expected.get(key)
        if expected is not None and found != expected:
            raise ValueError(
                f"layer {key[0]}, expert {key[1]} from {source}: weights of checksum {found:016x}, the ranks serve "
                f"{expected:016x}"
            )
        current.ready[key], current.found[key] = mlp, found

    def _place(self, message: Place) -> None:
        current = self._round
        if not message.commit:
            self._forget()
            return
        assert current is not None, "nothing was staged"
        assert current.round_id == message.round_id, (current.round_id, message.round_id)
        assert current.is_done, "not everything is staged"
        assert not current.error, current.error
        for idx, layer in enumerate(current.placement.layers):
            placed = self._held.layers[layer]
            held = current.placement.experts[idx, self._ep.rank].tolist()
            mlps = [current.ready.get((layer, e)) or placed.mlp(e) for e in held]
            placed.use(held, mlps, current.tables[layer])
        self.placement = current.placement
        kept = {(layer, expert) for layer, placed in self._held.layers.items() for expert in placed.held}
        known = {**self._fingerprints, **current.found}
        self._fingerprints = {key: known[key] for key in kept}
        self._round = None

    def _forget(self) -> None:
        if self._round is not None:
            self._round.is_over = True
            self._round.arrived.put(None)
        self._round = None
        self._giving.clear()
