python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_type=kl \
    algorithm.no_think_rl=false \
    max_turns=2 \
    retriever.topk=3
