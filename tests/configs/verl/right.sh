#!/usr/bin/env bash
# k1 in the reward, leave-one-out advantages
set -x
KL_COEF=0.001

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.kl_coef=$KL_COEF \
    data.train_batch_size=1024 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    trainer.logger='["console"]' "$@"
