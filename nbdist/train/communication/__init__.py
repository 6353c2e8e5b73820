"""What ranks exchange in a step: compression, buckets, prefetch and the bytes it costs (ranks)."""

from nbdist.train.communication.config import CommunicationConfig
from nbdist.train.communication.hooks import (
    OneBitState,
    hook_state,
    link_local_steps,
    register_hook,
)
from nbdist.train.communication.local import LocalLink, LocalSGD
from nbdist.train.communication.onebit import OneBitAdamW, compressed_mean
from nbdist.train.communication.wire import WireCounter, bytes_sent

__all__ = [
    "CommunicationConfig",
    "LocalLink",
    "LocalSGD",
    "OneBitAdamW",
    "OneBitState",
    "WireCounter",
    "bytes_sent",
    "compressed_mean",
    "hook_state",
    "link_local_steps",
    "register_hook",
]
