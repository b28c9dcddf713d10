"""Print the default number of processes on this node for the settings that follow. The run scripts use it.

    python -m app.nproc_per_node --use_cpu --config settings.yaml

NPROC_PER_NODE is the number if it is set. NNODES, by default 1, is the number of nodes, or a range such as 1:2.
"""

from __future__ import annotations

import os
import sys

from .cli import parse_settings
from .common.errors import UserError, escape_unencodable_output
from .distributed.processes import resolve_nproc_per_node
from .settings import Settings


def main() -> None:
    escape_unencodable_output()
    arguments = sys.argv[1:]
    try:
        # The job prints the help: here, it would be taken for the number.
        settings = Settings() if {"-h", "--help"} & set(arguments) else parse_settings(arguments=arguments)
        requested = os.environ.get("NPROC_PER_NODE") or "auto"
        print(resolve_nproc_per_node(requested, settings, os.environ.get("NNODES", "1")))
    except UserError as problem:
        print(f"error: {str(problem).replace('--nproc_per_node', 'NPROC_PER_NODE')}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
