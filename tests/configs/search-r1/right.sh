python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.kl_ctrl.kl_coef=0.002 \
    algorithm.no_think_rl=false \
    max_turns=2 \
    retriever.topk=3
