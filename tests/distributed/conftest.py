import pytest
from pool import Pool


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    pool = Pool(2, tmp_path_factory.mktemp("two"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    pool = Pool(4, tmp_path_factory.mktemp("four"))
    yield pool
    pool.close()
