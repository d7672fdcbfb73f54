"""Everything about a run's files: the append-only store, the figures and the report. Never trains, never imports torch."""
