"""The tasks agents are trained on: one folder per environment, all behind the Env protocol of `tether.core.protocols`.

`registry.make_env(name, **options)` builds one. Each folder holds the same files: env.py (the rules of play), generator.py (seed to
instance), reward.py (what is paid), render.py (what is shown) and a README. This package imports only `tether.core`.
"""
