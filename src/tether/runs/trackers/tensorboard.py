"""TensorBoard: event files in RUN/tensorboard, written by torch's own writer. `tensorboard --logdir runs` shows all runs of a folder."""

from collections.abc import Mapping

from tether.runs.trackers import TrackedRun

FOLDER = "tensorboard"


class TensorBoard:
    """Scalars by step. Steps that a resumed run plays again replace those that were there."""

    errors = (OSError,)

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A purge makes the reader drop what was written from that step on.
        self._writer = SummaryWriter(run.folder / FOLDER, purge_step=run.first_step)
        self._writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in run.config.items()), run.first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


make = TensorBoard
