"""The composition root: one YAML file becomes processes that serve, and end when told.

`config` reads the file, `rundir` and `session` know a run's files and processes, `leader` starts
and holds a cluster (`launch` is its view from outside), `roles` starts any single role, `actors`
and `supervisor` keep them under Ray, `cli` is the `headrace` command. The only room that imports
ray, and it does so in `actors` alone: roles start as plain processes too. Nothing that a request
carries passes through this room.
Import from the modules: `from headrace.cluster.config import load_config`.
"""
