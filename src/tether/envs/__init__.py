"""The tasks that agents are trained on, all behind the Env protocol of `tether.core.protocols`.

`registry.make_env(name, **options)` builds one. There is a folder per environment: env.py (options, rules, reward), what else it needs, its
tables under data/, and a README. `base` has the classes to derive from, `checker` tests any environment, and `remote` runs environments in
threads, in processes and over HTTP. This package imports only `tether.core`.
"""
