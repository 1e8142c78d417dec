"""From parts of tensors to the products and norms of a model."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from parallel.linear import Linear, Storage, build_linear
from parallel.norm import RmsNorm
from runtime.models.shards import Part
from runtime.weights import WeightSource


class Scratch(threading.local):
    """One growing buffer a thread: the page faults of fresh memory would cost more than the copies into it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def get(self, num_elements: int) -> Tensor:
        """[num_elements] float32, overwritten by the thread's next call."""
        if self._buffer.numel() < num_elements:
            self._buffer = torch.empty(num_elements)
        return self._buffer[:num_elements]


class PartReader:
    """Reads what it is asked for onto `device`; products take the form that `storage` allows. Threads may share it."""

    def __init__(self, source: WeightSource, device: torch.device, storage: Storage) -> None:
        self.source, self.device, self.storage = source, device, storage
        self._scratch = Scratch()

    def values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor, float32."""
        return self.source.take(name, shape).to(self.device)

    def weight(self, part: Part) -> Tensor:
        """[rows, columns] of `part`, float32."""
        return self.source.take(part.name, part.shape, rows=part.rows, cols=part.cols).to(self.device)

    def table(self, part: Part) -> Tensor:
        """[rows, columns] of `part` in the stored type."""
        return self.source.take(part.name, part.shape, rows=part.rows, cols=part.cols, dtype=None).to(self.device)

    def linear(self, *parts: Part) -> Linear:
        """One product of parts with equal columns, whose rows are fused."""
        num_rows, num_cols = sum(part.num_rows for part in parts), parts[0].num_cols
        scratch = self._scratch.get(num_rows * num_cols).view(num_rows, num_cols)
        begin = 0
        for part in parts:
            self.take_into(scratch[begin : begin + part.num_rows], part)
            begin += part.num_rows
        return self.build(scratch, parts[0].name)

    def build(self, weight: Tensor, name: str) -> Linear:
        """The product with `weight` [out_features, in_features], which is copied; `name` appears in errors."""
        return build_linear(weight.to(self.device), self.storage, name)

    def norm(self, name: str, dim: int, eps: float) -> RmsNorm:
        return RmsNorm(self.values(name, (dim,)), eps)

    def take_into(self, dest: Tensor, part: Part) -> None:
        """dest: [rows, columns] float32 in main memory."""
        self.source.take_into(dest, part.name, part.shape, rows=part.rows, cols=part.cols)
