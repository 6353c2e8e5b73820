"""DDP by hand, for torchrun (ranks)."""

import loop
from torch.nn.parallel import DistributedDataParallel

model, data = loop.start(rows_differ=True)
loop.run(DistributedDataParallel(model), data)
