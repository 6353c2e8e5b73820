"""Which errors come with advice."""

import pytest

from nbdist.rank.hints import hint_for


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("trying to initialize the default process group twice!", "leave init_process_group out"),
        ("Expected to have finished reduction in the prior iteration before", "DDP(model.module)"),
        ("Can't get attribute 'Net' on <module '__main__' (built-in)>", "multiprocessing_context"),
        ("DataLoader worker (pid(s) 12) exited unexpectedly", "multiprocessing_context"),
        ("CUDA out of memory. Tried to allocate 2 GiB", "empty_cache"),
    ],
)
def test_error_of_a_second_run_has_advice(text, advice):
    assert advice in hint_for(text, generation=0)


def test_broken_connection_is_an_old_group_only_where_there_was_one():
    text = "Connection closed by peer [127.0.0.1]:36570"
    assert "builds the model again" in hint_for(text, generation=1)
    assert hint_for(text, generation=0) == ""


def test_error_of_the_user_has_none():
    assert hint_for("boom", generation=3) == ""
