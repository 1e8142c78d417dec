"""The only place that starts torch.distributed: one process for each rank, met over a store that someone else hosts.

It may be left and joined again: each epoch of a deployment meets under a name of its own.
"""

from __future__ import annotations

import socket
import threading
import warnings
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from parallel.group import ProcessGroup
from parallel.layout import RankGroups

HOST = "127.0.0.1"
LEAVE_S = 0.5  # connections that nobody uses close at once


def listen_locally() -> socket.socket:
    """A listening socket for `host_store`, on a free port of this machine's loopback interface."""
    return listen_at(HOST)


def listen_at(host: str) -> socket.socket:
    """A listening socket for `host_store`, on a free port of `host`, an address of this machine."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def host_store(listener: socket.socket) -> TCPStore:
    """The store that the ranks meet over; it takes the listener and lasts as long as the returned object."""
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_ranks(
    rank: int, num_ranks: int, *, port: int, device_type: str, host: str = HOST, epoch: int = 0,
    timeout: timedelta | None = None,
) -> None:
    """Start torch.distributed in this process, with the ranks that join `epoch` over the store at `host`:`port`.

    Collective; raises RuntimeError when another rank does not come within `timeout` (None: the library's).
    """
    # Newer versions of torch have other names for some collectives, which the oldest one we support has not.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    store = PrefixStore(f"epoch {epoch}", TCPStore(host, port, is_master=False, wait_for_workers=False))
    backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def leave_ranks(groups: RankGroups) -> None:
    """End torch.distributed in this process, whatever the other ranks do; `join_ranks` may follow.

    NCCL's collectives are called off. gloo's cannot be: those under way end when the connections of the ranks that do
    not answer do, which a thread waits for. `groups` and whatever waits in them are of no use afterwards.
    """
    inner = [group.release() for group in (groups.tp, groups.ep) if isinstance(group, ProcessGroup)]
    for group in inner:
        group.abort()
    # The last one to let go of a group waits for its collectives: that must not be this thread.
    thread = threading.Thread(target=_leave, args=(inner,), name="leaving torch.distributed", daemon=True)
    del inner
    thread.start()
    thread.join(LEAVE_S)


def _leave(inner: list[dist.ProcessGroup]) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    inner.clear()
