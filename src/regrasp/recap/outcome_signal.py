"""Whether outcomes tell labels anything: where all attempts at a task ended alike, they do not, and that is said."""

from collections.abc import Iterable

from regrasp.core.outcome import Outcome

_SHOWN = 4


def one_sided(attempts: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each task whose attempts all succeeded or all failed.

    Args:
        attempts: The task and the outcome, in words, of each episode. Of a task with unknown ones nothing is said.
    """
    kinds: dict[str, set[str]] = {}
    for task, outcome in attempts:
        kinds.setdefault(task, set()).add(outcome)
    lines = []
    for task, found in kinds.items():
        if found == {Outcome.FAILURE.value}:
            lines.append(
                f"No episode of {task!r} is a success: outcomes give its labels no signal, and returns tell only how "
                "long an attempt lasted. Mend: add demonstrations, or rollouts of a policy that succeeds sometimes."
            )
        elif found == {Outcome.SUCCESS.value}:
            lines.append(
                f"No episode of {task!r} is a failure: outcomes give its labels no signal, and returns tell only fast "
                "from slow. Rollouts that fail sometimes would show what to leave."
            )
    rest = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"The same holds for {rest} more tasks."] if rest > 0 else lines
