"""torch with FSDP: what DCP saves is read and continued here."""

from collections.abc import Iterator

from tools.interop.continued import continued_check, state_check
from tools.interop.program import Check, Workplace


def checks(workplace: Workplace) -> Iterator[Check]:
    for source in sorted(workplace.made("fsdp/make.py", "--all").glob("torch-*")):
        yield state_check(source, source.name)
        for num_ranks in (1, 2):
            yield continued_check(workplace, source, source.name, num_ranks=num_ranks)
