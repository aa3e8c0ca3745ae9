"""Quantised checkpoints: which weights, how they are read, quantised, saved and loaded.

Other parts of the package import these names alone:

    absent               around_text, beside_text, leave_out
    activations          chosen, load_in_best, range_of
    calibration          importance_for, SAMPLE
    cutting              cutting, is_cutting, loading_class
    gguf.file            check_file
    in_place             keep_when_saving, LOADED, quantize_model
    layouts.files        check_files, checkpoint_files, LARGEST, progress_file, Shards
    mlx.names            check_architecture
    mlx.older_keys       with_older_keys
    mlx.writing          save_mlx, sizes_in_mlx
    mtp                  bytes_of_mtp, config_of_mtp, converted_mtp, empty_mtp, has_mtp, left_out_mtp, MTP,
                         note_folder, planned_mtp, read_mtp, recipe_of_last_layer, require_mtp
    on_disk              DiskPlan, memories_to_compare, planned, reading_beside_the_disk
    own.config           QuantizationConfig
    own.saving           restore_saving
    quantize.decision    weights_of
    quantize.importance  collect_importance, given_importance, Importance, is_file_of_importance,
                         read_importance
    quantize.recipe      ARGUMENTS, AUTO, fits, Recipe, recipe_of, requested_recipe, SAME
    quantize.sizes       bytes_a_token, bytes_of_experts, large_tables, memory_for_slots, prompt_bytes,
                         quantized_sizes, room_for_experts, share_of_token, total_bytes
    quantize.target      quantizable, Target
    quantizer            layout_of, Quantizer, register
    source               NO_MODEL, read_tokenizer, sample_of_checkpoint, Source
    threads              one_by_one, threads_crash
    write.parts          Parts
    write.plan           LoadPlan, planned
    write.saving         save_parts
"""
