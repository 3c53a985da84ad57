"""Encoder kernels in the idle time of an LLM's pipeline (Optimus: Feng et al., section 4), as pure planning.

Every GPU holds a share of the LLM and a share of an encoder. The LLM's step is timed first (`llm_timeline`), with all that its
GPUs leave idle (`idle_time`): a large bubble in front of their first kernel and one behind their last, bubbles of the pipeline
between them, and those of tensor parallelism inside every layer. Then each way to divide the encoders among the same GPUs
(`encoder_plans`) is given a schedule (`coarse_schedule`, `moved_schedule`, `filled_schedule`), and the fastest is taken
(`bubble_planner`). What no bubble takes lies in front of the LLM's step or behind it, and makes the step so much longer.
"""
