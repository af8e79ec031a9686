import os


# The test models are tiny: more threads than one cost more than they give, most of all with several processes at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402


torch.set_num_threads(1)
