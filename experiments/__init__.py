"""The definition of a run: configuration schema, experiments, run plan, and the trial directory that processes share.

The way in is `corral.experiments.registry.load_experiment`, then `corral.experiments.plan.make_run_plan`.
"""
