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
doctor
elastic
elastic/test_real_processes.py::test_a_damaged_contribution_is_left_out_by_name_and_comes_in_the_next_round
elastic/test_real_processes.py::test_a_killed_worker_costs_the_others_one_heartbeat_timeout[while
elastic/test_real_processes.py::test_a_worker_killed_in_its_healing_costs_the_others_nothing
elastic/test_real_processes.py::test_a_worker_that_was_stopped_until_the_run_was_over_does_not_go_on_alone
elastic/test_real_processes.py::test_every_method_survives_a_kill_and_a_restart[streaming]
elastic/test_real_processes.py::test_no_worker_ends_when_the_lighthouse_does
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
test_examples.py
test_decoupled_momentum.py::test_replicas
test_decoupled_momentum.py::test_the_coupled
test_decoupled_momentum.py::test_with_the_mean_over_senders
test_frozen.py
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
transport/test_rendezvous.py::test_two_workers
tools
train
transport
"""

# Processes, browsers, network namespaces and measurements: what finds least for its seconds.
SLOW = """
bench/test_bench.py::test_kernels_do_not_grow
codecs/kernels/test_triton_backend.py::test_it_rounds_every_operation
test_round_memory.py::test_a_round_takes_no_more_memory_than_it_may[decoupled
test_round_memory.py::test_a_round_takes_no_more_memory_than_it_may[demo
asynchronous/test_http.py::test_workers_and_server_may_be_killed_and_come_back
benchmarks/test_claims.py::test_a_small_run_of_the_gpu_setting_trains_here
cli/test_asynchronous_command.py::test_a_run_is_served_and_another_one_is_refused
cli/test_cli.py::test_torchrun_without_an_out_folder_reaches_the_digest_of_one_process
cli/test_output.py::test_a_command_whose_output
cli/test_output.py::test_a_full_disk
cli/test_output.py::test_a_reader
cli/test_plan_command.py::test_a_plan_starts_without_what_is_slow
cli/test_signals.py::test_a_run_that_is_asked_to_stop
cli/test_signals.py::test_an_elastic_worker
codecs/kernels/test_triton_backend.py::test_every_format
elastic/test_real_processes.py
elastic/test_worker_ranks.py
experiments/test_runners.py::test_a_run_whose_process_dies_twice_is_given_up
experiments/test_runners.py::test_each_run_has_an_observer_that_is_shown_its_records[runner1
experiments/test_runners.py::test_parallel_runs_give_the_same_bits_and_outlives_a_killed_process
fragments/test_sharding.py::test_shards_keep[outer_parameters
integrations/test_lightning.py::test_an_elastic_worker
integrations/test_lightning.py::test_two_workers_killed_and_resumed_end_as_if_left_alone[s
integrations/test_peft.py::test_two_workers
integrations/test_transformers.py::test_an_elastic_worker
integrations/test_transformers.py::test_elastic_workers
integrations/test_transformers.py::test_two_workers_killed_and_resumed_end_as_if_left_alone[s
integrations/test_transformers.py::test_workers_of_two_ddp_ranks
optim/test_muon_sharded.py
report/test_report_browser.py
test_examples.py::test_example_alone[lightning
test_examples.py::test_example_alone[nano
test_examples.py::test_example_with_two_workers_that_come
test_examples.py::test_example_with_two_workers_that_meet[hugging
test_examples.py::test_example_with_two_workers_that_meet[lightning
test_examples.py::test_example_with_two_workers_that_meet[nanochat
test_examples.py::test_the_script
test_examples.py::test_torchtitan
test_same_loop.py::test_it_is_the_loop_of_thinwire_train[diloco-lightning
test_import.py::test_import_takes_at_most_a_fifth_longer_than_torch
test_same_loop.py::test_it_is_the_loop_of_thinwire_train[muloco
train/data/test_corpora.py::test_importing_stays_light
train/test_elastic_train.py::test_torchrun_goes_on_with_what_simulated_workers_left
train/test_trainer.py::test_a_killed_rank_ends_the_others_and_all_resume[noloco
train/test_trainer.py::test_a_killed_rank_ends_the_others_and_all_resume[streaming
train/test_trainer.py::test_a_run_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been[2
train/test_trainer.py::test_a_run_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been[3
train/workers/test_ranks.py
train/workers/test_stacked.py
transport/test_message_series.py::test_more_loops_than_ever_on_one_group_reach_the_bits_of_one_process[at_once-3
transport/test_message_series.py::test_more_loops_than_ever_on_one_group_reach_the_bits_of_one_process[one_after_another-3
transport/test_message_series.py::test_no_later_transport_takes_a_message_that_was_left_under_way[3
transport/test_message_series.py::test_one_transport_too_many_is_refused_on_every_rank_until_one_is_gone[3
transport/test_replicated.py::test_a_ddp_group_is_taken_or_refused_on_every_rank[first_ranks
transport/test_replicated.py::test_a_ddp_group_is_taken_or_refused_on_every_rank[other_mesh
transport/test_transports.py::test_a_forked_child_that_exits_leaves_exchanges_alone
transport/test_transports.py::test_a_process_leaves_promptly_with_exchanges_under_way[4]
transport/test_transports.py::test_a_silent_peer_is_an_error_within_the_timeout[3
transport/test_transports.py::test_a_worker_that_lags_is_named[3
transport/test_transports.py::test_processes_reach_the_bits_of_one_process_with_every_method[3
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
