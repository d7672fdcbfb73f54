"""Several processes (ranks) that train one model together. docs/scaling.md describes how.

| module | holds |
|---|---|
| `ranks` | `Ranks`, what the parts of a run call; a world of one, which exchanges nothing |
| `process_group` | the same over torch's process group; `tether train --gpus N` |
| `slurm` | ranks that srun starts |
| `fsdp` | models divided among the ranks |
| `topology` | the file of `tether train --ray`: how many processes of each kind, what each takes, and where they are |
| `ray_run`, `ray_actors` | the run on a cluster: what asks Ray for it, and what runs in its workers |
"""
