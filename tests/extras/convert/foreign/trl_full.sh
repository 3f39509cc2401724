#!/bin/sh
# One machine with all its GPUs.
MODEL=org/base-0.5b
trl sft \
    --model_name_or_path $MODEL \
    --dataset_name org/conversations \
    --dataset_train_split train --dataset_test_split validation \
    --learning_rate 2.0e-5 \
    --num_train_epochs 1 \
    --packing \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --eos_token '<|im_end|>' \
    --eval_strategy steps \
    --eval_steps 100 \
    --output_dir out-sft \
    --push_to_hub > log.txt 2>&1
