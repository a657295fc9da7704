PERF=(--use-dynamic-batch-size)
python3 train_async.py \
   --advantage-estimator reinforce_plus_plus \
   --kl-coef 0.01 \
   --kl-loss-type k1 \
   --calculate-per-token-loss \
   ${PERF[@]}
