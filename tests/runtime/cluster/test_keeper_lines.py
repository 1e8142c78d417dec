"""The controller's lines to keepers: one that comes in the place of another has nothing to do with how that ended."""

from __future__ import annotations

from runtime.cluster.keeper_lines import KeeperLines
from runtime.cluster.keeper_messages import Abort
from tests.runtime.cluster.line_pair import line_pair


def test_a_line_that_broke_is_told_of_once() -> None:
    with line_pair() as (ours, _):
        lines = KeeperLines(stall_s=1.0)
        lines.add(3, ours)
        ours.close()
        lines.tell(3, Abort(epoch=1, leave_s=0.0))
        (lost,) = lines.take_lost()
        assert lost[0] == 3
        assert "is closed at this end" in lost[1]
        assert lines.take_lost() == []


def test_the_end_of_a_line_is_not_that_of_the_one_in_its_place() -> None:
    with line_pair() as (before, _), line_pair() as (after, _):
        lines = KeeperLines(stall_s=1.0)
        lines.add(3, before)
        before.close()
        lines.tell(3, Abort(epoch=1, leave_s=0.0))  # noticed here, and not told of yet
        lines.add(3, after)
        assert lines.take_lost() == []
        assert not lines.is_quiet(3)
        lines.drop(3)
