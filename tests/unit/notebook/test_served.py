"""`%distributed serve` and `unload`: their words, and what they show."""

import pytest
from IPython.core.error import UsageError

from nbdist.messages import EngineStats, ModelServed, ModelsUnloaded
from nbdist.notebook.arguments import line_parser, parse
from nbdist.notebook.served import freed, table

LINE = "serve 'a b' --replicas 2 --name small --engine native --weight-bits 8 --http --max-batch 4"


def test_words_of_serve_become_arguments():
    words = parse(line_parser(), LINE)

    assert (words.what, words.name, words.replicas) == ("a b", "small", 2)
    assert (words.engine, words.weight_bits, words.max_batch) == ("native", 8, 4)
    assert words.http
    assert words.tokenizer is None


def test_serve_and_unload_without_words_are_about_everything():
    assert parse(line_parser(), "serve").what is None
    words = parse(line_parser(), "unload")
    assert (words.name, words.now) == (None, False)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("serve a --engine fast", "invalid choice: 'fast'"),
        ("serve a --weight-bits 3", "invalid choice: 3"),
        ("serve a --replicas two", "invalid int value: 'two'"),
        ("unload a b", "unrecognized arguments: b"),
    ],
)
def test_wrong_words_are_named(line, text):
    with pytest.raises(UsageError, match=text):
        parse(line_parser(), line)


def test_table_has_a_line_a_replica_with_its_memory():
    stats = EngineStats(num_running=3, num_waiting=2, paged_bytes=500_000, capacity_bytes=4_000_000)
    served = ModelServed(
        rank=1,
        model="small",
        version=2,
        max_batch=8,
        context_length=512,
        weights_bytes=12_345_678,
        stats=stats,
        state="draining",
    )

    head, line = table([served]).splitlines()

    assert head.split() == [
        *("model", "rank", "version", "engine", "weights", "cache"),
        *("context", "running", "waiting", "state"),
    ]
    assert line.split() == [
        *("small", "1", "2", "native", "12.3", "MB", "0.5", "MB", "of", "4.0", "MB"),
        *("512", "3", "2", "draining"),
    ]
    assert table([]) == ""


def test_freed_memory_is_told_by_rank_and_the_gpus_where_there_are():
    one = ModelsUnloaded(
        rank=0, query_id="", models=("b", "a"), host_bytes=(700_000_000, 2_000_000)
    )
    other = ModelsUnloaded(
        rank=1, query_id="", models=("a",), host_bytes=(1, 1), device_bytes=(9_000_000, 0)
    )

    assert freed({0: one, 1: other}).splitlines() == [
        "rank 0: a, b unloaded; resident 700 MB -> 2 MB",
        "rank 1: a unloaded; resident 0 MB -> 0 MB, GPU 9 MB -> 0 MB",
    ]
