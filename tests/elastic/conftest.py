from bucket_workers import quick_fixture, store_fixture

__all__ = ["quick_fixture", "store_fixture"]
