"""The only place that starts torch.distributed: one process for each rank, met over a store that someone else hosts."""

from __future__ import annotations

import socket
import warnings

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

HOST = "127.0.0.1"


def listen_locally() -> socket.socket:
    """A listening socket for `host_store`, on a free port of this machine's loopback interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((HOST, 0))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def host_store(listener: socket.socket) -> TCPStore:
    """The store that the ranks meet over; it takes the listener and lasts as long as the returned object."""
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_ranks(rank: int, num_ranks: int, *, port: int, device_type: str) -> None:
    """Start torch.distributed in this process. Collective; raises RuntimeError when another rank does not come."""
    # Newer versions of torch have other names for some collectives, which the oldest one we support has not.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
