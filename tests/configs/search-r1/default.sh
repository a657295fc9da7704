python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    critic.ppo_micro_batch_size=8 \
    algorithm.no_think_rl=false \
    max_turns=2 \
    retriever.topk=3
