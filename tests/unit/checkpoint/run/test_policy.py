"""What stays and what goes, over random histories."""

import math
import random

from automodel_ckpt.checkpoint.run.resume import (
    KeepPolicy,
    Record,
    best_record,
    is_better,
    metric_of,
    newest_first,
)


def random_history(rng: random.Random) -> tuple[list[Record], KeepPolicy, set[str]]:
    steps = rng.sample(range(1, 60), rng.randint(0, 12))
    values = [None, math.nan, math.inf, 0.5, 1.0, 1.0, 2.0, -3.0, rng.random()]
    records = [Record(f"epoch_{s // 20}_step_{s}", s, s // 20, rng.choice(values)) for s in steps]
    policy = KeepPolicy(
        last=rng.choice([None, 0, 1, 2, 5, 100]),
        best=rng.choice([0, 0, 1, 3]),
        every_steps=rng.choice([None, None, 1, 7, 20]),
        steps=frozenset(rng.sample(range(1, 60), rng.randint(0, 4))),
        mode=rng.choice(["min", "max"]),
    )
    protected = {record.name for record in records if rng.random() < 0.15}
    return records, policy, protected


def test_ten_thousand_histories_keep_what_must_stay_and_remove_all_else() -> None:
    rng, removed_somewhere = random.Random(7), 0
    for _ in range(10_000):
        records, policy, protected = random_history(rng)
        before = list(records)
        removable = policy.removable(records, protected)
        removed_somewhere += bool(removable)
        assert records == before
        gone = {record.name for record in removable}
        kept = [record for record in records if record.name not in gone]
        if policy.last is None or not records:
            assert not gone
            continue
        assert newest_first(records)[0] in kept
        assert not gone & protected
        assert all(record.step not in policy.steps for record in removable)
        assert not policy.every_steps or all(
            record.step % policy.every_steps for record in removable
        )
        assert {r.name for r in newest_first(records)[: policy.last]} <= {r.name for r in kept}
        ranked = [record for record in records if metric_of({"m": record.metric}, "m") is not None]
        for record in removable:
            if record in ranked:
                better = [
                    r
                    for r in ranked
                    if r.metric == record.metric or is_better(r.metric, record.metric, policy.mode)
                ]
                assert len([r for r in better if r in kept]) >= policy.best
        why = {r.name for r in newest_first(records)[: max(policy.last, 1)]} | protected
        surplus = [
            r
            for r in kept
            if r.name not in why
            and r.step not in policy.steps
            and not (policy.every_steps and r.step % policy.every_steps == 0)
        ]
        assert len(surplus) <= policy.best
        assert policy.removable(kept, protected) == []
        assert [record.step for record in removable] == sorted(record.step for record in removable)
    assert removed_somewhere > 2_000


def test_of_equals_the_earliest_is_the_best_and_nan_never_is() -> None:
    records = [
        Record(f"epoch_0_step_{s}", s, 0, v)
        for s, v in [(1, math.nan), (2, 2.0), (3, 1.0), (4, 1.0), (5, None)]
    ]
    assert (best_record(records, "min") or records[0]).step == 3
    assert (best_record(records, "max") or records[0]).step == 2
    assert best_record(records[:1], "min") is None
