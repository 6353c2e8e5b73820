"""What to type about a start that has failed, by what its log says (client)."""

from __future__ import annotations

__all__ = ["advice"]

ADVICE = {
    "not enough slots": (
        "the launcher counts fewer slots than ranks: start fewer, or let them share cores with "
        "`%env PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe`, then start again"
    ),
    "Address already in use": (
        "another program took a port between its choice and its use: type the start again"
    ),
    "Cannot assign requested address": (
        "interface= is no address of this host: leave it out for loopback, `ip addr` lists others"
    ),
    "Unable to find address for": (
        "GLOO_SOCKET_IFNAME names no network interface of this host: `%env GLOO_SOCKET_IFNAME=lo`, "
        "then start again"
    ),
    "ModuleNotFoundError": "install the package that the log names where this Python finds it",
}


def advice(log: str) -> str:
    """Return what to do about a cause that is known; an empty text for any other."""
    return next((text for mark, text in ADVICE.items() if mark in log), "")
