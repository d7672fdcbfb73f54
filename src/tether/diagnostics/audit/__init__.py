"""The audit of saved rollouts: does the reasoning of a run, made in any framework, still depend on its input?

    found = tether.audit("rollouts.jsonl", model="smollm2")
    found.verdict.headline

`api` is that door, and puts the stages together. The files are read twice, both times in bounded memory: the first reading counts and plans
the windows, the second draws a seeded sample of them (`reading`). The sample becomes token ids (`encode`) and is scored, measured and judged window
by window (`measure`, `lexical`); several windows give a trend (`trend`). `result` holds all of it, also as plain JSON, which the report is made
from.
"""

from tether.core.reasoning import Verdict, VerdictCode
from tether.diagnostics.audit.api import AuditProgress, audit, audit_sample, collect
from tether.diagnostics.audit.result import Audit, AuditOptions, Collected, WindowAudit, to_document
from tether.diagnostics.audit.scorer import AuditScorer, load_scorer, resolve_model

__all__ = [
    "Audit", "AuditOptions", "AuditProgress", "AuditScorer", "Collected", "Verdict", "VerdictCode", "WindowAudit",
    "audit", "audit_sample", "collect", "load_scorer", "resolve_model", "to_document",
]  # fmt: skip
