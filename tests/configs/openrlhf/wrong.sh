ARGS=(
   --actor.model_name_or_path my-model
   --algo.advantage.estimator group_norm
   --algo.kl.use_loss
   --algo.kl.init_coef 0.001
)
python3 -m openrlhf.cli.train_ppo_ray ${ARGS[@]}
