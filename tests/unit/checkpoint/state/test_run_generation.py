"""The generation of a run whose nodes have separate directories: which checkpoints of a node are abandoned."""

from automodel_ckpt.checkpoint.node_directories import RunGeneration


def test_the_latest_start_counts_also_if_its_nodes_had_no_record() -> None:
    of_absent_nodes = RunGeneration().next([]).next([]).next([])
    of_new_nodes = RunGeneration().next([])
    assert of_new_nodes.number > of_absent_nodes.number
    # The clock was behind.
    behind = RunGeneration(of_new_nodes.number + 10**12)
    assert behind.next([]).number == behind.number + 1
