python train.py \
   --advantage-estimator reinforce_plus_plus \
   --kl-coef 0.01 \
   --kl-loss-type k1 \
   --calculate-per-token-loss \
   --ref-load my-model
