"""Controller and ranks on one machine: rings, vitals page, store and rank processes, up and down again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from launch.rank_main import RankSpec
from launch.startup_view import StartupView
from parallel.groups import host_store, listen_locally
from parallel.shm_group import segment_size
from runtime.config import MAX_DRAFT_TOKENS, EngineConfig, padded_rows
from runtime.engine import Deployment
from runtime.inbox import Inbox
from runtime.loading import check_device, local_device, read_facts
from runtime.models.config import ModelConfig, load_model_config
from runtime.placing import check_fits, load_bytes
from runtime.rank import settle
from runtime.rank_channel import RankChannel
from runtime.rank_watch import Patience, RankWatch, rank_names
from runtime.recovery import CannotRecover, RestartLimits
from runtime.request import MAX_LOGIT_BIAS, MAX_LOGPROBS
from runtime.ring import RingWriter, create_segment
from runtime.sizing import Sizes, choose_sizes
from runtime.vitals import Vitals, page_size

RANK_MODULE = "launch.rank_main"
MAX_PLAN_BYTES = 1 << 28


def start(
    config: EngineConfig, *, module: str = RANK_MODULE, patience: Patience | None = None,
    restarts: RestartLimits | None = None,
) -> Deployment:
    """Start `config.layout.ep` rank processes, wait until all have loaded, and have them allocate.

    `module`: what each runs, `python -m module`. `restarts`: when a rank fails, all are started again, within these
    limits; None: they are not. The thread that calls this, or steps the engine, must outlive the ranks: Linux ends them
    with it.
    Raises ValueError for a layout that does not divide, a device that is not here, and whatever a rank finds wrong with
    the model; RankFailure naming the rank that died. No process is left then.
    """
    model = load_model_config(config.model)
    check_fits(config, model)
    check_device(config.device)  # ranks would only find that they cannot meet
    local_device(config.device, 0, config.layout.ep)
    facts = read_facts(config)
    bring_up = partial(_bring_up, config, model, module, patience or Patience())
    up = bring_up(choose_sizes(config, facts))

    def recover() -> RankChannel:
        again = bring_up(up.sizes)
        if again.sizes != up.sizes:
            again.channel.kill()
            raise CannotRecover(
                f"the ranks that were started again hold {again.sizes.num_pages} KV pages, the first ones held "
                f"{up.sizes.num_pages}"
            )
        return again.channel

    return Deployment(
        facts=facts, sizes=up.sizes, channel=up.channel, bytes_read=up.bytes_read,
        recover=recover if restarts is not None else None, restarts=restarts or RestartLimits(max_restarts=0),
    )


@dataclass(frozen=True, kw_only=True)
class _Up:
    """Ranks that have allocated."""

    channel: RankChannel
    sizes: Sizes
    bytes_read: tuple[int, ...]


def _bring_up(config: EngineConfig, model: ModelConfig, module: str, patience: Patience, most: Sizes) -> _Up:
    """Start all ranks and wait for them; they get as many pages as all of them can hold, and `most` at most."""
    channel = _spawn(config, model, most, module, patience)
    try:
        ranks = _wait_ready(channel, config.layout.ep)
        sizes = Sizes(max_model_len=most.max_model_len, num_pages=min(most.num_pages, settle(ranks)))
        channel.start(sizes)
    except BaseException:
        channel.kill()
        raise
    return _Up(channel=channel, sizes=sizes, bytes_read=tuple(rank["bytes_read"] for rank in ranks))


def _wait_ready(channel: RankChannel, num_ranks: int) -> list[dict[str, int]]:
    """With a live line for each phase where standard error is a terminal."""
    if not sys.stderr.isatty():
        return channel.wait_ready()
    view = StartupView(num_ranks, sys.stderr)
    try:
        ranks = channel.wait_ready(view)
        view.ready()
        return ranks
    finally:
        view.close()


def _spawn(
    config: EngineConfig, model: ModelConfig, sizes: Sizes, module: str, patience: Patience
) -> RankChannel:
    """Everything but waiting: a channel to processes that are loading."""
    names = rank_names(config.layout)
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        # Ranks that share memory have nothing to meet over.
        listener = None if config.shares_memory else stack.enter_context(listen_locally())
        port = listener.getsockname()[1] if listener is not None else 0
        plans_fd = _segment(stack, "plans", plan_bytes(config, sizes, model.vocab_size))
        vitals_fd = os.memfd_create("lockstep-vitals", os.MFD_CLOEXEC)
        stack.callback(os.close, vitals_fd)
        os.ftruncate(vitals_fd, page_size(len(names)))
        results_fds = [_segment(stack, f"results-{rank}", result_bytes(config)) for rank in range(len(names))]
        groups = _group_segments(stack, config, model)
        plans = RingWriter(plans_fd, "plans", [f"rank {rank}" for rank in range(len(names))])
        try:
            with _interrupts_blocked():
                for rank, results_fd in enumerate(results_fds):
                    spec = RankSpec(
                        rank=rank, parent_pid=os.getpid(), store_port=port, vitals_fd=vitals_fd, plans_fd=plans_fd,
                        results_fd=results_fd, tp_fd=groups.tp_fds[config.layout.dp_rank(rank)], ep_fd=groups.ep_fd,
                        exchange_bytes=groups.slot_bytes, config=asdict(config),
                    )
                    processes.append(_start_rank(module, spec, config.threads))
            vitals = Vitals(vitals_fd, len(names))
            return RankChannel(
                config.layout, plans, [Inbox(fd) for fd in results_fds], vitals,
                RankWatch(names, processes, vitals, patience), step_timeout_s=patience.step_s,
                store=host_store(listener) if listener is not None else None,
            )
        except BaseException:
            _kill(processes)
            plans.close()
            raise


@dataclass(frozen=True, kw_only=True)
class _GroupSegments:
    tp_fds: list[int]  # of each dp group
    ep_fd: int
    slot_bytes: int


def _group_segments(stack: ExitStack, config: EngineConfig, model: ModelConfig) -> _GroupSegments:
    """Shared memory for the exchanges between ranks, -1 in the place of what is not needed."""
    layout = config.layout
    if not config.shares_memory:
        return _GroupSegments(tp_fds=[-1] * layout.dp, ep_fd=-1, slot_bytes=0)
    slot_bytes = exchange_bytes(config, model)

    def segment(name: str, num_ranks: int) -> int:
        fd = os.memfd_create(f"lockstep-{name}", os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        os.ftruncate(fd, segment_size(num_ranks, slot_bytes))
        return fd

    tp_fds = [segment(f"tp-{group}", layout.tp) if layout.tp > 1 else -1 for group in range(layout.dp)]
    return _GroupSegments(tp_fds=tp_fds, ep_fd=segment("ep", layout.ep), slot_bytes=slot_bytes)


def exchange_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """The largest message of one exchange between ranks. Memory is taken as messages reach it, not for the largest."""
    layout, tokens = config.layout, config.capacity * config.tp
    top_k = model.router.top_k if model.router is not None else 0
    scattered = tokens * model.hidden_size  # partial sums of all tokens of a dp group
    # A rank sends a token to as many ranks as there are, and sends back what it has got from all of them.
    dispatched = layout.ep * config.capacity * (model.hidden_size + 2 * top_k)
    rows = padded_rows(config.max_num_seqs) + layout.tp  # dealt rows are padded to a multiple of tp
    logits = rows * (1 + config.k) * -(-model.vocab_size // layout.tp)
    logprobs = rows * (1 + config.k) * 2 * MAX_LOGPROBS  # ids are of 8 bytes
    return 4 * max(scattered, dispatched, logits, logprobs)


def _start_rank(module: str, spec: RankSpec, threads: int) -> subprocess.Popen[bytes]:
    """`python -m module`, in this checkout or installation, with nothing of ours but the descriptors it needs."""
    root = str(Path(__file__).resolve().parent.parent)
    search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": search}
    process = subprocess.Popen(
        [sys.executable, "-m", module, f"--rank={spec.rank}"],  # the rank is for whoever reads a list of processes
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment,
        pass_fds=[
            fd for fd in (spec.vitals_fd, spec.plans_fd, spec.results_fd, spec.tp_fd, spec.ep_fd) if fd >= 0
        ],
    )
    assert process.stdin is not None
    try:
        process.stdin.write(spec.to_json())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already; whoever waits for it will say so
    return process


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """What starts in here is born deaf to Ctrl-C: it reaches every process, and is the controller's to answer.

    The controller hears it afterwards, when it knows all that it has started; or before, if it runs other threads, and
    then a rank that it does not know yet ends with it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _segment(stack: ExitStack, name: str, capacity: int) -> int:
    fd = create_segment(name, capacity)
    stack.callback(os.close, fd)
    return fd


def plan_bytes(config: EngineConfig, sizes: Sizes, vocab_size: int) -> int:
    """Room for a step that admits as many requests of full length as it can, prompts twice over.

    A request may bar every token of the vocabulary until it has `min_tokens`.
    """
    num_new = config.dp * min(config.max_num_seqs, config.prefill_chunk_size)
    per_request = 2 * 4 * sizes.max_model_len + 4 * vocab_size + 8 * MAX_LOGIT_BIAS
    return min((1 << 20) + num_new * per_request, MAX_PLAN_BYTES)


def result_bytes(config: EngineConfig) -> int:
    """Room for a few results of full batches with all logprobs."""
    per_token = 4 + 4 + 8 * MAX_LOGPROBS
    results = 3 * config.max_num_seqs * (8 + (1 + min(config.k, MAX_DRAFT_TOKENS)) * per_token)
    return (1 << 16) + results + load_bytes(config)
