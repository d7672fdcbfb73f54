"""The shared words of Tether: records, enums, errors, configuration, seeds and the think/answer grammar.

Everything above imports from here and this imports nothing above it. Standard library, numpy, pydantic and PyYAML only: no torch.
"""
