"""Runs untrusted programs, isolated from the rest of the machine; docs/sandbox.md describes how."""
