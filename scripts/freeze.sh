#!/usr/bin/env bash
# Write constraints.txt from what .venv holds now. Run it after a change of dependencies that passed.
set -euo pipefail
cd "$(dirname "$0")/.."
pins=$(.venv/bin/pip freeze --all --exclude pip --exclude lockstep-llm --exclude-editable | sed 's/+cpu$//')
{
  echo "# The versions CI runs, for \`pip install -c constraints.txt\`. Written by scripts/freeze.sh."
  echo "# torch==2.13.0 also admits a local build such as 2.13.0+cpu, which spares gigabytes of CUDA."
  echo "$pins"
} > constraints.txt
