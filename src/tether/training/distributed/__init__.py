"""Several processes (ranks) that train one model together. docs/scaling.md describes how.

| module | holds |
|---|---|
| `ranks` | `Ranks`, what the parts of a run call; a world of one, which exchanges nothing |
| `process_group` | the same over torch's process group |
| `launch` | `tether train --gpus N` |
"""
