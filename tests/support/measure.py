"""What a process took of the processor: how long it takes by the clock is up to what else the machine does."""

import resource


def seconds_of_children() -> float:
    """Of all processes together that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
