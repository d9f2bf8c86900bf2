# A sed script for the manifest of `init --from`: what suits some processors instead of GPUs.
s/^microbatch = .*/microbatch = 1/
s/^replica_batch_min = .*/replica_batch_min = 1/
s/^inner_batch = .*/inner_batch = 8/
s/^block_samples = .*/block_samples = 16/
s/^round_samples = .*/round_samples = 16/
s/^warmup_samples = .*/warmup_samples = 40/
s/^average_share = .*/average_share = 0.0/
s/^validation_samples = .*/validation_samples = 16/
s/^validation_every_samples = .*/validation_every_samples = 64/
s/^microbatch_timeout_s = .*/microbatch_timeout_s = 900.0/
s/^hop_timeout_min_s = .*/hop_timeout_min_s = 120.0/
s/^announce_period_s = .*/announce_period_s = 5.0/
s/^record_ttl_s = .*/record_ttl_s = 60.0/
