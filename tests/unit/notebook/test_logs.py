"""A rank's log as `%distributed logs` shows it."""

import pytest

from nbdist.notebook import logs
from nbdist.notebook.logs import read_log
from nbdist.rank import log as rank_log
from nbdist.rank.log import RankLog


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def write(directory, *texts):
    written = RankLog(directory / "logs" / "rank-1.log", on_open=lambda _file: None)
    for text in texts:
        written.write(text)
    written.close()


def test_log_is_shown_whole_or_its_last_lines(directory):
    write(directory, "a\nb\n", "c\n")
    assert read_log(directory, 1) == "--- rank 1 ---\na\nb\nc"
    assert read_log(directory, 1, tail=1) == "--- rank 1 ---\nc"


def test_log_that_began_a_new_file_is_shown_with_the_one_before(directory, monkeypatch):
    monkeypatch.setattr(rank_log, "MAX_LOG_CHARS", 3)
    write(directory, "1\n", "2\n", "3\n")
    assert len(list((directory / "logs").iterdir())) == 2
    assert read_log(directory, 1) == "--- rank 1 ---\n1\n2\n3"


def test_very_long_log_is_cut_and_its_file_named(directory, monkeypatch):
    monkeypatch.setattr(logs, "MAX_CHARS", 4)
    write(directory, "a\nb\nc\n")
    heading, *lines = read_log(directory, 1).splitlines()
    assert lines == ["b", "c"]
    assert "the last 4 of 6 characters" in heading
    assert heading.endswith("rank-1.log")
