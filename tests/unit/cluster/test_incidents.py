"""The log of what has befallen the ranks."""

from __future__ import annotations

import time

from nbdist.cluster.incidents import Incident, note_incident, read_incidents


def incident(**values):
    """Return one that went well."""
    given = {
        "at": time.time(), "deaths": {1: "killed by SIGKILL"}, "outcome": "healed",
        "seconds": 2.25, "step": 7, "steps_lost": 1, "source": "memory of peers",
    }  # fmt: skip
    return Incident(**(given | values))


def test_incidents_are_read_as_they_were_noted(tmp_path):
    assert read_incidents(tmp_path) == []
    seen = [incident(at=1.0, missing=("lock",)), incident()]
    for one in seen:
        note_incident(tmp_path, one)
    assert read_incidents(tmp_path) == seen
    assert read_incidents(tmp_path, within_seconds=60) == seen[1:]


def test_an_incident_is_told_in_words():
    text = incident(missing=("lock",)).in_words()
    assert "rank 1: killed by SIGKILL; replaced, all go on after step 7" in text
    assert "1 step done again" in text
    assert "2.2 s" in text
    assert text.endswith("the new process lacks: lock")
    shrunk = incident(outcome="shrunk", num_ranks=2)
    assert shrunk.is_survived
    assert "; left out, 2 ranks go on after step 7" in shrunk.in_words()
    assert "not healed: why" in incident(outcome="not healed: why").in_words()
