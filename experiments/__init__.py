"""What a run is: configuration schema, experiments, the run plan, and the trial directory that all processes share.

The way in is `corral.experiments.registry.load_experiment`, then `corral.experiments.plan.make_run_plan`.
"""
