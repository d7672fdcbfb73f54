"""Runs programs nobody has read, apart from everything else on the machine; the one place that does. How: docs/sandbox.md."""
