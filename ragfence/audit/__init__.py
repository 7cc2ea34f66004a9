"""Decision rows, and the auditor that checks them: why a call was skipped, which attempt won, and what was saved."""

from __future__ import annotations

from ragfence.audit.auditor import AuditFinding, AuditReport, check

__all__ = ["AuditFinding", "AuditReport", "check"]
