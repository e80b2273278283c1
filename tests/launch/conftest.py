from tests.supervise.conftest import start as start
