"""What is set for every host: overrides only. Nothing is set, and nothing needs to be.

Take the # away from a line to set it; docs/settings.md has every setting with its default. A file
group_data/NAME.py is for the group NAME and counts before this one.
"""

# Where the cache lies, and what it may take
# tier_dir = "/mnt/nvme/kv"
# cache_limit_gib = 200.0
# free_floor_gib = 10.0

# What is served
# model_source = "/srv/models/llama"
# max_model_len = 16384
# served_model_name = "assistant"

# Who may use it (beyond this machine only with a key, which never stands here)
# api_host = "0.0.0.0"
# api_key_file = "secrets/api_key"

# Further flags for vllm serve, one item for each word
# runner_extra_args = ["--max-num-seqs", "4"]
