python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path my-model \
   --reward.remote_url reward.py
