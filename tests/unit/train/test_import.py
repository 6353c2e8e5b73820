"""The training layer stands alone."""

import subprocess
import sys


def test_importing_train_imports_no_notebook():
    code = (
        "import sys, nbdist.train\n"
        "found = {'IPython', 'ipyparallel', 'ipykernel', 'nbdist.cluster', 'nbdist.notebook'}\n"
        "assert not found & set(sys.modules), found & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
