python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path my-model \
   --rollout.n_samples_per_prompt 8 \
   --algo.advantage.estimator rloo \
   --algo.kl.estimator k1 \
   --algo.kl.init_coef 1e-2 \
   --actor.adam.lr 5e-7
