"""One replica's step loop: scheduler, block and state accounting, runner, sampler."""
