"""Which tests run when: one table, so that a tier is read and weighed in one place.

`make test-fast` runs what is fast, also because no line names it, `make test` what is core, too,
and `make test-all` everything. A line names a folder, a file or tests by the beginning of their id,
from `tests/` on (or with `src/`, for doctests). Of several that name a test, the longest decides.
"""

# Of each kind of codec, group, grid, values and rounding one; and what is cheap in a longer folder.
FAST = """
codecs/kernels/test_numba_backend.py::test_any_number_of_rows
codecs/kernels/test_numba_backend.py::test_wrong_places
codecs/test_codecs.py::TestCastBF16
codecs/test_codecs.py::TestE3M0Rows
codecs/test_codecs.py::TestMidRise2Chunks
codecs/test_codecs.py::TestPerRole
codecs/test_codecs.py::TestRandomKBF16Tensors
codecs/test_codecs.py::TestStatistical2Blocks
codecs/test_codecs.py::TestStochastic8Linear
codecs/test_codecs.py::TestTopKSignLevelsBlocksDCT
codecs/test_codecs.py::TestTopKSignMeanChunks
tools/test_check_style.py
tools/test_mirror.py
tools/test_tiers.py
"""

CORE = """
asynchronous
bench
cli
codecs/kernels/test_numba_backend.py
codecs/kernels/test_triton_backend.py::test_it
codecs/test_codecs.py::Test
docs
doctor
elastic
elastic/bucket/test_bucket_group.py::test_the_sender_of_a_message_that_is_damaged_on_its_way_takes_a_snapshot[sealed-body
elastic/bucket/test_bucket_group.py::test_what_another_wrote_in_the_place_of_a_message_is_left_out_by_all[replayed-sealed
elastic/bucket/test_bucket_session.py::test_a_snapshot_that_is_damaged_is_passed_over[damaged_values
elastic/bucket/test_bucket_session.py::test_a_worker_that_comes_back_after_its_round_was_deleted_catches_up[before
elastic/test_real_processes.py::test_a_killed_worker_costs_the_others_one_heartbeat_timeout[while
elastic/test_real_processes.py::test_every_method_survives_a_kill_and_a_restart[streaming]
elastic/test_worker_ranks.py::test_a_rank_killed_in_an_exchange_ends_its_worker_which_comes_back_and_heals[diloco-1-landed]
exchange/test_exchange.py
exchange/test_pairs.py
exchange/test_sizes.py
experiments
fragments/test_sharding.py
integrations
outer/test_gossip.py
plan/test_calibration.py
plan/test_forecast.py
plan/test_traffic.py::test_codecs_over_both_exchanges
plan/test_traffic.py::test_presets
report
runs/test_status.py
src/thinwire/plan
test_decoupled_momentum.py::test_replicas
test_decoupled_momentum.py::test_the_coupled
test_decoupled_momentum.py::test_with_the_mean_over_senders
test_examples.py
test_frozen.py
test_import.py::test_wrong_flags_are_refused_without_torch[train --sync-evry
test_loop_state.py
test_method.py::test_what_top_k_delivers_by_a_reduce_scatter
test_outer_loop.py
test_outer_parameters.py
test_resume.py
test_round_memory.py
test_round_waits.py::test_a_
test_same_loop.py
test_streaming.py
testing
tools
train
transport
transport/test_rendezvous.py::test_two_workers
"""

# Processes, browsers, network namespaces and measurements: what finds least for its seconds.
SLOW = """
asynchronous/test_http.py::test_processes_finish
asynchronous/test_http.py::test_workers_and_server_may_be_killed_and_come_back
bench/test_bench.py::test_kernels_do_not_grow
bench/test_bench.py::test_stacked_workers_are_measured_against_a_loop
benchmarks/test_claims.py::test_a_small_run_of_the_gpu_setting_trains_here
cli/test_asynchronous_command.py::test_a_run_is_served_and_another_one_is_refused
cli/test_cli.py::test_compare_searches_rates
cli/test_cli.py::test_torchrun_without_an_out_folder_reaches_the_digest_of_one_process
cli/test_compare_display.py::test_ctrl_c
cli/test_lighthouse_command.py::test_the_command_prints_token_address_and_events_and_ends_on_a_signal[15
cli/test_output.py::test_a_command_whose_output
cli/test_output.py::test_a_full_disk
cli/test_output.py::test_a_reader
cli/test_plan_command.py::test_a_plan_starts_without_what_is_slow
cli/test_report_watch.py::test_a_comparison_that_was_killed
cli/test_report_watch.py::test_ctrl_c
cli/test_report_watch.py::test_the_page_follows
cli/test_signals.py::test_a_run_that_is_asked_to_stop
cli/test_signals.py::test_an_elastic_worker
codecs/kernels/test_triton_backend.py::test_every_format
codecs/kernels/test_triton_backend.py::test_it_gives_the_bits_of_the_torch_path_in_the_interpreter[table
codecs/kernels/test_triton_backend.py::test_it_gives_the_bits_of_the_torch_path_in_the_interpreter[topk
codecs/kernels/test_triton_backend.py::test_it_rounds_every_operation
docs/test_snippets.py::test_a_page_that_needs_servers
docs/test_tutorial_commands.py
docs/test_tutorials.py::test_an_extension
docs/test_tutorials.py::test_nodes_of_two
docs/test_tutorials.py::test_workers_by_an_address
elastic/bucket/test_bucket_group.py::test_the_sender_of_a_message
elastic/bucket/test_bucket_group.py::test_what_another_wrote
elastic/bucket/test_bucket_processes.py
elastic/bucket/test_bucket_session.py::test_a_snapshot_that_is_damaged
elastic/bucket/test_bucket_session.py::test_a_worker_that_comes_back_after
elastic/bucket/test_bucket_session.py::test_a_worker_whose_anchor_changed_takes_a_snapshot[3
elastic/bucket/test_bucket_session.py::test_a_worker_with_other_initial_weights_takes_those_of_the_others[0
elastic/bucket/test_bucket_session.py::test_garbage_beside_rolls_and_calls_is_passed_over["a"
elastic/bucket/test_bucket_session.py::test_garbage_beside_rolls_and_calls_is_passed_over[[]
elastic/bucket/test_bucket_session.py::test_garbage_beside_rolls_and_calls_is_passed_over[garbage
elastic/bucket/test_bucket_session.py::test_those_that_come_wait_for_one_that_still_waits_for_a_lost_worker
elastic/test_across_the_internet.py::test_a_worker_behind
elastic/test_across_the_internet.py::test_two_workers_behind_routers
elastic/test_across_the_internet.py::test_what_the_lighthouse
elastic/test_real_processes.py
elastic/test_real_processes.py::test_a_damaged_contribution
elastic/test_worker_ranks.py
experiments/test_runners.py::test_a_run_that_fails_says_so_at_once_and_has_a_log[runner1
experiments/test_runners.py::test_a_run_whose_process_dies_twice_is_given_up
experiments/test_runners.py::test_each_run_has_an_observer_that_is_shown_its_records[runner1
experiments/test_runners.py::test_parallel_runs_give_the_same_bits_and_outlives_a_killed_process
experiments/test_runners.py::test_what_processes_print
fragments/test_sharding.py::test_shards_keep[host_memory
fragments/test_sharding.py::test_shards_keep[outer_parameters
integrations/test_lightning.py::test_an_elastic_worker
integrations/test_lightning.py::test_two_workers_killed_and_resumed_end_as_if_left_alone
integrations/test_peft.py::test_two_workers
integrations/test_transformers.py::test_an_elastic_worker
integrations/test_transformers.py::test_elastic_workers
integrations/test_transformers.py::test_two_workers_killed_and_resumed_end_as_if_left_alone
integrations/test_transformers.py::test_workers_of_two_ddp_ranks
optim/test_muon_sharded.py
plan/test_traffic.py::test_presets[ddp-8
plan/test_traffic.py::test_presets[decoupled_momentum-8
plan/test_traffic.py::test_presets[demo-8
plan/test_traffic.py::test_presets[sparseloco-8
plan/test_traffic.py::test_presets[streaming_diloco-8
plan/test_traffic.py::test_presets[streaming_muloco-8
report/test_report_browser.py
report/test_run_page.py::test_a_page_whose_runs_go_on_loads_itself_again
test_examples.py::test_example_alone[hugging_face
test_examples.py::test_example_alone[lightning
test_examples.py::test_example_alone[nano
test_examples.py::test_example_under_torchrun[hugging_face
test_examples.py::test_example_with_two_workers_that_come
test_examples.py::test_example_with_two_workers_that_meet[hugging
test_examples.py::test_example_with_two_workers_that_meet[lightning
test_examples.py::test_example_with_two_workers_that_meet[nanochat
test_examples.py::test_example_with_two_workers_that_meet[nanogpt
test_examples.py::test_the_script
test_examples.py::test_torchtitan
test_import.py::test_help_comes_without_torch[bench
test_import.py::test_help_comes_without_torch[doctor
test_import.py::test_help_comes_without_torch[lighthouse
test_import.py::test_help_comes_without_torch[serve
test_import.py::test_help_comes_without_torch[status
test_import.py::test_help_comes_without_torch[work
test_import.py::test_import_loads_nothing_of_elastic_runs
test_import.py::test_import_takes_at_most_a_fifth_longer_than_torch
test_import.py::test_what_type_checkers_see_is_what_there_is[experiments
test_import.py::test_what_type_checkers_see_is_what_there_is[optim
test_import.py::test_what_type_checkers_see_is_what_there_is[train
test_import.py::test_what_type_checkers_see_is_what_there_is[transport
test_import.py::test_wrong_flags_are_refused_without_torch[compare
test_import.py::test_wrong_flags_are_refused_without_torch[doctor
test_import.py::test_wrong_flags_are_refused_without_torch[lighthouse
test_import.py::test_wrong_flags_are_refused_without_torch[serve
test_import.py::test_wrong_flags_are_refused_without_torch[status
test_import.py::test_wrong_flags_are_refused_without_torch[train
test_package.py::test_a_users_script
test_package.py::test_both_are
test_package.py::test_tests_run
test_package.py::test_the_sdist
test_package.py::test_the_wheel
test_resume.py::test_a_run_goes_on_from_any_step[diloco, 2 bits, owners
test_resume.py::test_a_run_goes_on_from_any_step[diloco, outer
test_resume.py::test_a_run_goes_on_from_any_step[eager, 2 bits
test_resume.py::test_a_run_goes_on_from_any_step[noloco,
test_resume.py::test_a_run_goes_on_from_any_step[streaming, no
test_resume.py::test_a_run_goes_on_from_any_step[streaming, pairs
test_round_memory.py::test_a_round_takes_no_more_memory_than_it_may[decoupled
test_round_memory.py::test_a_round_takes_no_more_memory_than_it_may[demo
test_round_memory.py::test_a_round_takes_no_more_memory_than_it_may[diloco:clip
test_round_memory.py::test_a_round_takes_no_more_memory_than_it_may[muloco:bits=2:clip
test_round_memory.py::test_a_round_takes_no_more_memory_than_it_may[sparse_muloco
test_round_waits.py::test_a_round_waits_no_more_often_than_it_may[decoupled
test_round_waits.py::test_a_round_waits_no_more_often_than_it_may[demo
test_same_loop.py::test_it_is_the_loop_of_thinwire_train[diloco-lightning
test_same_loop.py::test_it_is_the_loop_of_thinwire_train[muloco
tools/test_architecture.py::test_counts_of_the_package
tools/test_docs_site.py::test_a_module
tools/test_docs_site.py::test_a_page_comes
tools/test_docs_site.py::test_every
tools/test_docs_site.py::test_the_search
train/data/test_corpora.py::test_importing_stays_light
train/test_bucket_train.py::test_a_killed_worker
train/test_bucket_train.py::test_a_worker_that_is_asked
train/test_bucket_train.py::test_a_worker_that_is_asked_to_stop
train/test_bucket_train.py::test_workers_behind_routers
train/test_bucket_train.py::test_workers_that_share_a_folder_reach_the_digest_of_one_process[open
train/test_bucket_train.py::test_workers_that_share_a_folder_reach_the_digest_of_one_process[sealed
train/test_elastic_bucket_train.py::test_a_bucket
train/test_elastic_bucket_train.py::test_a_worker_that_waits
train/test_elastic_bucket_train.py::test_another_token
train/test_elastic_bucket_train.py::test_it_runs_without_torchft
train/test_elastic_bucket_train.py::test_of_two
train/test_elastic_bucket_train.py::test_one_is_killed
train/test_elastic_bucket_train.py::test_two_workers_that_share_a_folder_end_as_one_run[file
train/test_elastic_bucket_train.py::test_two_workers_that_share_a_folder_end_as_one_run[variable
train/test_elastic_bucket_train.py::test_watching
train/test_elastic_train.py::test_a_run_goes_on_with_another_number_of_workers[ddp
train/test_elastic_train.py::test_a_run_goes_on_with_another_number_of_workers[muloco
train/test_elastic_train.py::test_a_run_goes_on_with_another_number_of_workers[sparse
train/test_elastic_train.py::test_torchrun_goes_on_with_what_simulated_workers_left
train/test_launch.py::test_ranks_with_a_token_seal_and_reach_the_digest_of_one_process[streaming
train/test_trainer.py::test_a_killed_rank_ends_the_others_and_all_resume[noloco
train/test_trainer.py::test_a_killed_rank_ends_the_others_and_all_resume[streaming
train/test_trainer.py::test_a_run_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been[1
train/test_trainer.py::test_a_run_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been[2
train/test_trainer.py::test_a_run_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been[3
train/test_trainer.py::test_dropout_draws_the_same_numbers_in_both_worlds
train/test_trainer.py::test_nothing_of_the_process_group_outlives_a_run
train/test_trainer.py::test_torchrun_reaches_the_digest_of_one_process[muloco
train/test_trainer.py::test_torchrun_reaches_the_digest_of_one_process[noloco
train/workers/test_agreement_probe.py::test_a_probe_changes_nothing[ddp
train/workers/test_agreement_probe.py::test_a_probe_changes_nothing[streaming
train/workers/test_ranks.py
train/workers/test_stacked.py
transport/test_bucket.py::test_a_killed_worker_goes_on_from_its_checkpoint_while_the_others_wait[5
transport/test_bucket.py::test_a_killed_worker_goes_on_from_its_checkpoint_while_the_others_wait[8-diloco
transport/test_bucket.py::test_a_slow_store
transport/test_bucket.py::test_a_slow_store_delays
transport/test_bucket.py::test_a_store_that_fails_to_delete
transport/test_bucket.py::test_a_worker_that_comes_back_too_late
transport/test_bucket.py::test_processes_that_share_a_bucket_reach_the_digests_of_one_process[4
transport/test_bucket.py::test_processes_that_share_a_folder
transport/test_bucket.py::test_silence
transport/test_bucket.py::test_what_fails_in_passing_changes_nothing[409
transport/test_bucket.py::test_what_fails_in_passing_changes_nothing[50
transport/test_bucket.py::test_what_fails_in_passing_changes_nothing[c
transport/test_bucket.py::test_what_fails_in_passing_changes_nothing[lost
transport/test_message_series.py::test_more_loops_than_ever_on_one_group_reach_the_bits_of_one_process[at_once-3
transport/test_message_series.py::test_more_loops_than_ever_on_one_group_reach_the_bits_of_one_process[one_after_another-3
transport/test_message_series.py::test_no_later_transport_takes_a_message_that_was_left_under_way[3
transport/test_message_series.py::test_one_transport_too_many_is_refused_on_every_rank_until_one_is_gone[3
transport/test_rendezvous.py::test_a_number_that_is_taken_is_named
transport/test_rendezvous.py::test_ranks_that_hold_the_same
transport/test_rendezvous.py::test_two_workers_of_two_fsdp_ranks
transport/test_replicated.py::test_a_ddp_group_is_taken_or_refused_on_every_rank[first_ranks
transport/test_replicated.py::test_a_ddp_group_is_taken_or_refused_on_every_rank[not_in_group-patterns4
transport/test_replicated.py::test_a_ddp_group_is_taken_or_refused_on_every_rank[other_mesh
transport/test_transports.py::test_a_forked_child_that_exits_leaves_exchanges_alone
transport/test_transports.py::test_a_process_leaves_promptly_with_exchanges_under_way
transport/test_transports.py::test_a_process_leaves_promptly_with_exchanges_under_way[4]
transport/test_transports.py::test_a_silent_peer_is_an_error_within_the_timeout[3
transport/test_transports.py::test_a_worker_that_lags_is_named
transport/test_transports.py::test_processes_reach_the_bits_of_one_process_with_every_method[3
transport/test_transports.py::test_workers_that_exchange_different_things_are_told[kinds_of
transport/test_transports.py::test_workers_that_exchange_different_things_are_told[sizes_of_gathers-3
transport/test_transports.py::test_workers_that_exchange_different_things_are_told[sizes_of_r
transport/test_transports.py::test_workers_that_exchange_different_things_are_told[sizes_of_sw
"""

TIERS = {"fast": FAST, "core": CORE, "slow": SLOW}
TIER_OF = {line: tier for tier, lines in TIERS.items() for line in lines.split("\n")[1:-1]}


def of(test: str) -> str:
    """The tier of a test by its id: fast, core or slow.

    >>> of("tests/elastic/test_real_processes.py::test_a_worker_that_stays_alone_says_so")
    'slow'
    """
    test = test.removeprefix("tests/")
    lines = [line for line in TIER_OF if test.startswith(line)]
    return TIER_OF[max(lines, key=len)] if lines else "fast"
